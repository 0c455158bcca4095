"""`python -m testtime` is the `testtime` command; so `torchrun -m testtime train …` works as well."""

from testtime.cli import main

if __name__ == "__main__":
    main()
