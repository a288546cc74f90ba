"""The paper's high-throughput experiments (section 3.4, appendix C.2)."""
