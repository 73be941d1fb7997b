"""Real federations: the same methods on Flower's SuperLink and SuperNodes (needs the extra `redgrape[flower]`).

folder.py         what a deployment and each of its sites have on disk
certificates.py   the certificate authority, the server's certificate, a key for each site
wire.py           what crosses between server and site: a small header, and named tensors
engine.py         the server's engine, which asks the sites through Flower's grid
deployed_run.py   a run whose clients are sites, and the federation as the server knows it
server_app.py     Flower's ServerApp: carries out a run
client_app.py     Flower's ClientApp: passes a question on to the site's resident process
resident.py       a site's resident process, which keeps the data and runs the client half of a method
site.py           what a site answers
site_states.py    a client's state on the site's disk, by run and round
launch.py         Flower's own commands with the settings of a deployment
processes.py      the processes of a role and what they start: owned, watched, ended
link.py           what the server's machine asks its SuperLink
doctor.py         what may be wrong with a deployment, and what to do
"""
