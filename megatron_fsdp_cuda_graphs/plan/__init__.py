"""What flags would do, said without a GPU: whether they fit, what would be captured, how much memory it takes."""
