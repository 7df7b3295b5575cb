"""`epochgate probe`: asks a live server, as an ordinary and harmless client, what it can promise about resumed streams.

client.py is the wire, survey.py what the questions share, sessions.py and streams.py are the questions, run.py asks
them in order. findings.py names what can be found, meanings.py says what it means, policy.py derives the policy to
recommend, report.py shows it all, command.py is the command line.
audit.py is `epochgate audit`: what a policy would have decided about recorded traffic.
"""
