//! Fields of a PATCH, which can be left alone, changed or cleared.

use serde::{Deserialize, Deserializer};

/// Reads a field that is there, `null` included, as `Some`. With `#[serde(default)]` a missing field is `None`: left
/// alone; `Some(None)` clears it.
///
/// # Errors
/// Those of reading a `T`.
pub fn some<'de, T: Deserialize<'de>, D: Deserializer<'de>>(field: D) -> Result<Option<Option<T>>, D::Error> {
    Option::<T>::deserialize(field).map(Some)
}
