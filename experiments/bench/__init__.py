"""Times of the model: beside the library's implementation, by context, and of compilation."""
