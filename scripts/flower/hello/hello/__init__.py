"""A Flower app for measuring what a message costs apart from the work that it asks for."""
