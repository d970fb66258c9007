from dflop.cli import main

main()
