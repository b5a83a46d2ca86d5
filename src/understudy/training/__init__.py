"""Training runs, from settings to a folder, and the engines that step them."""
