-- Sessions and all that belongs to them. Times are milliseconds since the Unix epoch, ids are
-- hyphenated UUIDs, enumerations are the words of the API.

-- `doc` is the whole row as JSON; the other columns are those that are searched, and the two
-- counters that the store keeps itself.
CREATE TABLE sessions (
    id TEXT NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL,
    next_event_seq INTEGER NOT NULL,
    key TEXT,
    key_freed INTEGER NOT NULL,
    state TEXT NOT NULL,
    runtime TEXT NOT NULL,
    deleted_at INTEGER,
    doc TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX sessions_key_held ON sessions (key) WHERE key_freed = 0 AND key IS NOT NULL;
CREATE INDEX sessions_key ON sessions (key) WHERE key IS NOT NULL;
CREATE INDEX sessions_state ON sessions (state, id);
CREATE INDEX sessions_deleted ON sessions (deleted_at) WHERE deleted_at IS NOT NULL;

-- In the order in which filters look: all sessions with a pair, by id.
CREATE TABLE session_metadata (
    k TEXT NOT NULL,
    v TEXT NOT NULL,
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    PRIMARY KEY (k, v, session_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX session_metadata_session ON session_metadata (session_id);

-- AUTOINCREMENT: a number that a follower has seen is never given to another event.
CREATE TABLE events (
    global INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,
    actor TEXT NOT NULL,
    operation_id TEXT,
    data TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX events_seq ON events (session_id, seq);

CREATE TABLE operations (
    id TEXT NOT NULL PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at INTEGER,
    intent TEXT NOT NULL,
    error TEXT
) STRICT;
CREATE INDEX operations_session ON operations (session_id);
CREATE INDEX operations_running ON operations (id) WHERE state = 'running';

-- The session is part of the primary key: what a hostile session reports can't touch another's.
CREATE TABLE execs (
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    key TEXT,
    state TEXT NOT NULL,
    generation INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at INTEGER,
    record TEXT NOT NULL,
    PRIMARY KEY (session_id, id)
) STRICT;
CREATE UNIQUE INDEX execs_key ON execs (session_id, key) WHERE key IS NOT NULL;
CREATE INDEX execs_running ON execs (session_id, id) WHERE state = 'running';

CREATE TABLE terminals (
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    name TEXT,
    state TEXT NOT NULL,
    generation INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at INTEGER,
    record TEXT NOT NULL,
    PRIMARY KEY (session_id, id)
) STRICT;
CREATE INDEX terminals_running ON terminals (session_id, id) WHERE state = 'running';

-- `scopes` and `sessions` are JSON lists; `sessions` is NULL where all are meant.
CREATE TABLE tokens (
    id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    scopes TEXT NOT NULL,
    sessions TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER,
    last_used_at INTEGER
) STRICT;

-- `status` and `body` are NULL until the request is answered; `made` names what it made.
CREATE TABLE requests (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    route TEXT NOT NULL,
    body_hash TEXT NOT NULL,
    instance TEXT NOT NULL,
    begun_at INTEGER NOT NULL,
    made TEXT,
    status INTEGER,
    body BLOB,
    PRIMARY KEY (owner, key, route)
) STRICT;
CREATE INDEX requests_begun ON requests (begun_at);

CREATE TABLE audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    actor TEXT NOT NULL,
    method TEXT NOT NULL,
    path TEXT NOT NULL,
    status INTEGER NOT NULL,
    session_id TEXT
) STRICT;
CREATE INDEX audit_at ON audit (at);

CREATE TABLE meta (
    name TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;
