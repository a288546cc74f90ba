"""`apar convert`: a model learns to fork from its own answers, by one command after another."""
