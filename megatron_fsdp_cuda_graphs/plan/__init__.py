"""Shows without a GPU whether flags fit together, which graphs they capture, and how much memory these take."""
