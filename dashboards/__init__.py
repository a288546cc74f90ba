"""What an operator sees of a cluster and is alerted on: files, and the code that makes them."""
