-- The first version of the file of `sqlite:///path`. A session is removed with all that belongs to it.
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;

CREATE TABLE sessions (
    number INTEGER PRIMARY KEY,
    id BLOB NOT NULL UNIQUE,
    life TEXT NOT NULL,
    run INTEGER NOT NULL, -- the run of the proxy that wrote it last
    fenced INTEGER NOT NULL,
    active_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    head_rev INTEGER NOT NULL,
    head BLOB NOT NULL
);
CREATE INDEX sessions_by_expiry ON sessions (expires_at);
CREATE INDEX sessions_by_activity ON sessions (fenced, active_at);

CREATE TABLE streams (
    session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,
    key INTEGER NOT NULL,
    rev INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (session, key)
) WITHOUT ROWID;

CREATE TABLE blocks (
    session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,
    stream INTEGER NOT NULL,
    number INTEGER NOT NULL,
    events BLOB NOT NULL,
    PRIMARY KEY (session, stream, number)
) WITHOUT ROWID;
