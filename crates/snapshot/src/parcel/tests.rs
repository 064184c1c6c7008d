//! Parcels in a repository in a temporary directory. Owners, whiteouts and attributes need root.

mod adopting;
mod damage;
mod files;
mod hostile;
mod manifests;
mod properties;
mod special;
mod world;
