"""One engine behind its HTTP application, as a Ray actor."""
