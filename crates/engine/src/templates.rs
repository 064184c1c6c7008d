//! Templates, as callers manage them.

use crate::{Caller, Engine, Error, TemplateSource, inner::blocking, programs::template_error, tokens::admin_only};
use snapshot::template::{Listed, TemplateError, TemplateRef};
use std::{fs::File, io, path::Path};

/// Why no template could be made of what stands at `path`: mostly for what stands there.
fn source_error(error: TemplateError, path: &Path) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(one) = cause {
        let kind = one.downcast_ref::<io::Error>().map(io::Error::kind);
        if matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)) {
            return Error::NoSpace { detail: format!("can't take {} as a template: {error}", path.display()) };
        }
        cause = one.source();
    }
    match error {
        TemplateError::Io { .. } | TemplateError::Tree(_) | TemplateError::Extract(_) => {
            Error::invalid("path", format!("{} can't be taken as a template: {error}", path.display()))
        }
        other => template_error(other),
    }
}

impl Engine {
    /// The templates that have a name.
    ///
    /// # Errors
    /// The folder can't be read.
    pub async fn templates(&self) -> Result<Vec<Listed>, Error> {
        let inner = self.inner.clone();
        blocking(move || inner.programs.templates.list().map_err(template_error)).await?
    }

    /// Makes a template from files of the server's machine.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::Invalid`] for a bad name or path.
    pub async fn template_add(&self, caller: &Caller, name: &str, source: TemplateSource) -> Result<TemplateRef, Error> {
        admin_only(caller)?;
        let (inner, name) = (self.inner.clone(), name.to_owned());
        blocking(move || {
            let path = match &source {
                TemplateSource::Dir(path) | TemplateSource::Tar(path) | TemplateSource::OciLayout { dir: path, .. } => path,
            };
            if !path.is_absolute() {
                return Err(Error::invalid("path", "it must be absolute: it is one of the server's machine"));
            }
            let templates = &inner.programs.templates;
            let made = match &source {
                TemplateSource::Dir(path) => templates.add_dir(&name, path),
                TemplateSource::Tar(path) => {
                    let archive = File::open(path).map_err(|e| Error::invalid("path", format!("{}: {e}", path.display())))?;
                    templates.add_tar(&name, archive)
                }
                TemplateSource::OciLayout { dir, reference } => templates.add_oci_layout(&name, dir, reference.as_deref()),
            };
            made.map_err(|error| source_error(error, path))
        })
        .await?
    }

    /// Takes a template's name away. Its files stay for as long as sessions need them.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::NotFound`].
    pub async fn template_remove(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        admin_only(caller)?;
        let (inner, name) = (self.inner.clone(), name.to_owned());
        blocking(move || inner.programs.templates.remove(&name).map_err(template_error)).await?
    }
}
