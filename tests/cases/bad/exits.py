# error: importing tests/cases/bad/exits.py: SystemExit: 3
# at: 5
import sys

sys.exit(3)
