"""Images and their labels: where they come from, how they are changed, how they are batched."""
