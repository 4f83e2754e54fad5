"""Methods of personalised federated learning, one paper in one file, for whoever installs this package."""
