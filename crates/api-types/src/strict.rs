//! Parts of requests that are kept as they came: read more strictly from a client than from storage, where a newer version
//! may have written fields that this one doesn't know.

use model::{ByteSize, IdleAction, IdlePolicy, IdleWhen, Resources};
use serde::{Deserialize, Deserializer};

/// A [`Resources`] with no unknown field.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StrictResources {
    cpus: Option<f64>,
    memory_bytes: Option<ByteSize>,
    disk_bytes: Option<ByteSize>,
    pids: Option<u64>,
}

/// An [`IdlePolicy`] with no unknown field.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StrictIdle {
    after_seconds: u64,
    action: IdleAction,
    when: Option<IdleWhen>,
}

impl From<StrictResources> for Resources {
    fn from(read: StrictResources) -> Resources {
        let StrictResources { cpus, memory_bytes, disk_bytes, pids } = read;
        Resources { cpus, memory_bytes, disk_bytes, pids }
    }
}

impl From<StrictIdle> for IdlePolicy {
    fn from(read: StrictIdle) -> IdlePolicy {
        let StrictIdle { after_seconds, action, when } = read;
        IdlePolicy { after_seconds, action, when: when.unwrap_or(IdleWhen::NoActivity) }
    }
}

/// Reads the field `resources`.
///
/// # Errors
/// A field that isn't known, or a value that can't be.
pub(crate) fn resources<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Resources>, D::Error> {
    Ok(Option::<StrictResources>::deserialize(field)?.map(Resources::from))
}

/// Reads the field `idle`.
///
/// # Errors
/// As [`resources`].
pub(crate) fn idle<'de, D: Deserializer<'de>>(field: D) -> Result<Option<IdlePolicy>, D::Error> {
    Ok(Option::<StrictIdle>::deserialize(field)?.map(IdlePolicy::from))
}

/// Reads the field `idle` of a PATCH, as [`crate::some`] does.
///
/// # Errors
/// As [`resources`].
pub(crate) fn some_idle<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Option<IdlePolicy>>, D::Error> {
    idle(field).map(Some)
}

#[cfg(test)]
mod tests {
    use crate::{CreateSession, PatchSession};

    #[test]
    fn an_unknown_field_is_named_in_the_depth_too() {
        for body in [r#"{"resources":{"kee":1}}"#, r#"{"idle":{"after_seconds":1,"action":"stop","kee":1}}"#] {
            let error = serde_json::from_str::<CreateSession>(body).unwrap_err().to_string();
            assert!(error.contains("unknown field `kee`"), "{error}");
        }
        let patch = r#"{"idle":{"after_seconds":1,"action":"stop","kee":1}}"#;
        assert!(serde_json::from_str::<PatchSession>(patch).unwrap_err().to_string().contains("`kee`"));
        let good = r#"{"resources":{"pids":9,"cpus":null},"idle":{"after_seconds":1,"action":"none"}}"#;
        let good = serde_json::from_str::<CreateSession>(good).unwrap();
        assert_eq!(good.resources.and_then(|r| r.pids), Some(9));
        assert!(good.idle.is_some());
        assert_eq!(serde_json::from_str::<PatchSession>(r#"{"idle":null}"#).unwrap().idle, Some(None));
    }
}
