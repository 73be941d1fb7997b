"""The processes of server and sites: how they are started, watched and ended, and who may connect to them."""
