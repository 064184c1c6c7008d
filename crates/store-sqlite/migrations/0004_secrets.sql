-- Secrets, encrypted under a key that isn't here. `hosts` is a JSON list.
CREATE TABLE secrets (
    name TEXT NOT NULL PRIMARY KEY,
    sealed BLOB NOT NULL,
    hosts TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT;
