from redgrape.cli import main

main()
