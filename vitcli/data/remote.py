"""Stream files from http(s) URLs. If a connection fails, stalls or ends early, the download resumes
at the same offset, under the policy of `vitcli/retry.py`. Standard library only."""

import base64
import hashlib
import http.client
import io
import math
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from vitcli.atomic import atomic_write
from vitcli.data.cache import cache_directory, copy_limited
from vitcli.errors import DataError
from vitcli.retry import Failure, is_temporary, retry, retry_after
from vitcli.words import URL_USER

READ_TIMEOUT = 20.0
"""Read timeout in seconds, after which a request is retried."""
FIRST_TIMEOUT = 5.0
"""Seconds for which the first request for a dataset is retried: its URL may be mistyped."""

_MAX_DISCARDED = 1 << 20
"""Maximum bytes that `seek` reads and discards rather than making a new request."""


class NotFoundError(DataError):
    """The file does not exist: status code 404, 410, or 403, which S3 may return for it."""


class RemoteFile(io.RawIOBase):
    """A remote file that supports reading and seeking forward. Reading raises DataError."""

    def __init__(
        self, url: str, timeout: float | None = None, read_timeout: float | None = None
    ) -> None:
        self.url, self.timeout = url, timeout
        self.read_timeout = self._last_timeout = read_timeout or READ_TIMEOUT
        self.position = 0
        self.size: int | None = None
        self.tag: str | None = None
        """The ETag or Last-Modified header, which changes when the file does."""
        self._response: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset + (self.position if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END or target < self.position:
            raise io.UnsupportedOperation("a download can only seek forwards")
        if target - self.position > _MAX_DISCARDED:
            self._disconnect()
            self.position = target
        while self.position < target and self.read(min(target - self.position, 1 << 16)):
            pass
        return self.position

    def readinto(self, buffer: Any) -> int:
        count: int = self._retry(lambda read_timeout: self._read(buffer, read_timeout))
        self.position += count
        return count

    def open(self) -> None:
        """Send the request, which sets `size` and `tag`."""
        self._retry(self._connect)

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _retry(self, call: Any) -> Any:
        return retry(
            call,
            self._classify_error,
            timeout=self.timeout,
            read_timeout=self.read_timeout,
            position=lambda: self.position,
        )

    def _read(self, buffer: Any, read_timeout: float) -> int:
        if self.size is not None and self.position >= self.size:
            return 0
        try:
            self._connect(read_timeout)
            if self.size == 0:
                return 0
            content = self._response.read1(len(buffer))  # available data, without waiting
        except BaseException:
            self._disconnect()
            raise
        if not content and self.size is not None:
            self._disconnect()
            raise ConnectionError(f"the response ended after {self.position:,} bytes")
        buffer[: len(content)] = content
        return len(content)

    def _connect(self, read_timeout: float) -> None:
        if self._response is not None:
            return
        headers = {"User-Agent": "vitcli", "Accept-Encoding": "identity"}
        if self.position:
            headers["Range"] = f"bytes={self.position}-"
        escaped = quote(URL_USER.sub("", self.url), safe="%/:=&?~#+!$,;'@()*[]")
        request = urllib.request.Request(escaped, headers=headers)
        if user := URL_USER.search(self.url):
            encoded = base64.b64encode(unquote(user[0][:-1]).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {encoded}")
        self._last_timeout = read_timeout
        response = self._response = urllib.request.urlopen(request, timeout=read_timeout)
        start, size = 0, response.headers.get("Content-Length")
        if response.status == 206:
            header = response.headers.get("Content-Range", "")
            if (match := re.match(r"bytes (\d{1,18})-\d*/(.+)", header)) is None:
                raise ConnectionError(f"the response has an invalid Content-Range: '{header}'")
            start, size = int(match[1]), match[2]
        size = int(size) if size is not None and size.isdecimal() else None
        if response.headers.get_content_type() == "text/html":
            raise DataError(
                "the server sent a web page instead of a file",
                where=self.url,
                hint="open the URL in a browser: it may require a login",
            )
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if self.position and ((size, tag) != (self.size, self.tag) or start > self.position):
            raise DataError("the file changed while it was being read", where=self.url)
        self.size, self.tag = size, tag
        while start < self.position:  # the server does not support ranges
            skipped = len(response.read(min(self.position - start, 1 << 16)))
            if not skipped:
                raise ConnectionError(f"the response ended after {start:,} bytes")
            start += skipped

    def _disconnect(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.close()

    def _classify_error(self, error: Exception) -> Failure:
        where, hint = self.url, "try again, or check the URL in a browser"
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            reason = str(error.reason).partition("\n")[0]
            what = f"the server returned {error.code} ({reason})"
            if error.code in (403, 404, 410):
                return Failure(NotFoundError(what, where=where, hint="check the URL"), False)
            data_error = DataError(what, where=where, hint=hint)
            return Failure(data_error, is_temporary(error.code), retry_after(error.headers))
        cause: Any = getattr(error, "reason", None) or error  # URLError wraps the cause
        if isinstance(cause, TimeoutError):
            what = f"the server did not respond for {self._last_timeout:.2g} seconds"
            return Failure(DataError(what, where=where, hint=hint), True, timed_out=True)
        is_valid_url = not isinstance(cause, http.client.InvalidURL)
        if is_valid_url and isinstance(cause, OSError | http.client.HTTPException):
            reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            return Failure(DataError(f"cannot be read: {reason}", where=where, hint=hint), True)
        what = f"not a valid URL: {cause}"
        return Failure(DataError(what, where=where, hint="check the URL"), False)


def download(url: str, limit: float = math.inf) -> Path:
    """Download a file, unless the cache directory has its current version, and return its path.

    Raises:
        NotFoundError: the file does not exist.
        DataError: it cannot be read, or has more than `limit` bytes.
        OutputError: it cannot be written to the cache.
    """
    with RemoteFile(url, FIRST_TIMEOUT) as remote:
        remote.open()
        remote.timeout = None
        version = f"{url}\0{remote.size}\0{remote.tag}"
        name = Path(unquote(urlsplit(url).path)).name or "file"
        key = hashlib.sha256(version.encode()).hexdigest()[:20]
        target = cache_directory("downloads") / key / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(target) as file:
                copy_limited(io.BufferedReader(remote, 1 << 20), file, limit, url)
        return target
