"""The laboratory: experiments, simulations and sizing, in virtual time or on this machine."""
