"""The paper's high-throughput experiments (section 3.4, appendix C.2), in engines that live here."""
