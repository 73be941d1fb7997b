"""Real federations: the same methods on Flower's SuperLink and SuperNodes (needs the extra `redgrape[flower]`).

folder.py         what a deployment and each of its sites have on disk
create.py         makes such a folder; certificates.py: its authority, the server's certificate, a key for each site
wire.py           what crosses between server and site: a small header, and named tensors
engine.py         the server's engine, which asks the sites through Flower's grid
federation.py     the federation as one party knows it
deployed_run.py   a run whose clients are sites; server_app.py: Flower's ServerApp, which carries it out
site.py           what a site answers; site_data.py: its data; site_states.py: its client's state, by run and round
resident.py       a site's resident process, which keeps the data; client_app.py: Flower's ClientApp, which asks it
server_role.py    the server's processes; site_role.py: a site's; submission.py: a run handed over and followed
processes.py      processes that are owned, watched and ended with all that they have started
launch.py         Flower's own commands with the settings of a deployment; link.py: what is asked of the SuperLink
doors.py          who is let in where Flower listens, and how much of a request is read
warm.py           processes for Flower's messages, forked from one that has everything imported
doctor.py         what may be wrong with a deployment, and what to do
"""
