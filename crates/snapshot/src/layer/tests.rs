//! Disks that are mounted, written to and captured, on the file system of the temporary directory. They need root.

mod captures;
mod flattening;
mod hostile;
mod passes;
mod properties;
mod stores;
mod world;
