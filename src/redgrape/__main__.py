from redgrape.cli.main import main

main()
