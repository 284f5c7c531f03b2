"""Pages between a pool and a staging buffer, compared and summed up while they are copied."""
