"""The processes of server and sites, and how they are started, watched and stopped."""
