"""Clients on other machines: the server's side, the nodes' side, and Flower as the carrier."""
