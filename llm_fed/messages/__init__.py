"""What travels and what is kept: messages as bytes, states in fewer bits and of lower rank."""
