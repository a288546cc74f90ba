"""`python -m k8s`: write what is made of dashboards/."""

from k8s.made import write

if __name__ == "__main__":
    write()
