"""Shows without a GPU whether flags fit together, what would be captured and how much memory that takes."""
