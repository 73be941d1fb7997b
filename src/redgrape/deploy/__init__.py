"""Real federations: the methods as they are, on Flower's SuperLink and SuperNodes (the extra `redgrape[flower]`)."""
