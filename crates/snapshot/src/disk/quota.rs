//! A limit on the size of a disk, kept by the file system itself.

use super::DiskError;
use model::ByteSize;
use std::path::Path;

/// Asks the file system to keep the layer in `upper` within `limit`.
///
/// # Errors
/// [`DiskError::Unsupported`] always: no file system's project quota is driven, so callers watch the size
/// ([`super::usage_bytes`]) and say so.
pub fn set_project_quota(upper: &Path, limit: ByteSize) -> Result<(), DiskError> {
    Err(DiskError::Unsupported {
        reason: format!(
            "{} can't be limited to {} bytes by the file system: project quotas aren't used; the size is watched instead",
            upper.display(),
            limit.0
        ),
    })
}
