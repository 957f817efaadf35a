"""`python -m studies`: list the studies."""

from studies.cli import main

if __name__ == "__main__":
    main()
