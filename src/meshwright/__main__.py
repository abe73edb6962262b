"""`python -m meshwright`, so that `torchrun -m meshwright train …` works."""

from meshwright.cli.main import main

main()
