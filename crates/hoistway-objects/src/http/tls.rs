//! Which certificates are trusted.

use crate::{file_state::FileState, per_process::PerProcess};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{
    collections::HashMap,
    env, io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

/// Whose roots are trusted, and what they were like: others count once the files that have them were written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Roots {
    /// A file that has them, as `AWS_CA_BUNDLE` names one for servers of AWS and what speaks its protocol. Without one they are
    /// those of this machine, or of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
    bundle: Option<String>,
    /// What the variables name.
    files: Vec<FileState>,
}

impl Roots {
    /// Those of this machine.
    pub(crate) fn of_machine() -> Self {
        let file = env::var_os(FILE).map(PathBuf::from);
        let folders = env::var_os(FOLDERS);
        let folders = folders.iter().flat_map(env::split_paths);
        Self { bundle: None, files: file.into_iter().chain(folders).map(FileState::of).collect() }
    }

    /// Those of a file.
    pub(crate) fn of_file(path: String) -> Self {
        let files = vec![FileState::of(PathBuf::from(&path))];
        Self { bundle: Some(path), files }
    }
}

/// The variables that name roots of this machine.
const FILE: &str = "SSL_CERT_FILE";
const FOLDERS: &str = "SSL_CERT_DIR";

/// Configurations that are kept.
const MAX_CONFIGS: usize = 16;

/// Configurations by their roots.
type Configs = Mutex<HashMap<Roots, Arc<ClientConfig>>>;

/// The configuration of connections that trust these roots.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if there are none.
pub(super) fn config(roots: &Roots) -> io::Result<Arc<ClientConfig>> {
    static CONFIGS: PerProcess<Configs> = PerProcess::new();
    let mut configs = CONFIGS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(config) = configs.get(roots) {
        return Ok(config.clone());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(store(roots)?)
        .with_no_client_auth();
    if configs.len() >= MAX_CONFIGS {
        configs.clear();
    }
    Ok(configs.entry(roots.clone()).or_insert(Arc::new(config)).clone())
}

fn store(roots: &Roots) -> io::Result<RootCertStore> {
    let (certificates, source, problems) = match &roots.bundle {
        None => {
            let found = rustls_native_certs::load_native_certs();
            let named = [FILE, FOLDERS]
                .into_iter()
                .filter_map(|name| Some(format!("{name} ({})", env::var(name).ok()?)));
            let named = named.collect::<Vec<_>>().join(" and ");
            let problems: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
            (found.certs, named, problems)
        }
        Some(path) => {
            let (mut certificates, mut problems) = (Vec::new(), Vec::new());
            match CertificateDer::pem_file_iter(path) {
                Ok(found) => found.for_each(|own| match own {
                    Ok(certificate) => certificates.push(certificate),
                    Err(error) => problems.push(error.to_string()),
                }),
                Err(error) => problems.push(error.to_string()),
            }
            (certificates, format!("AWS_CA_BUNDLE ({path})"), problems)
        }
    };
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(certificates);
    if !store.is_empty() {
        return Ok(store);
    }
    let mut reason = match source.is_empty() {
        true if cfg!(windows) => {
            "this machine has no trusted root certificates; set SSL_CERT_FILE".to_owned()
        }
        true => {
            "this machine has no trusted root certificates; install ca-certificates, or set SSL_CERT_FILE"
                .to_owned()
        }
        false => format!("{source} has no certificate that can be used"),
    };
    if let Some(problem) = problems.first() {
        reason = format!("{reason}: {problem}");
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_named_with_what_is_wrong() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("none.pem");
        let roots = Roots::of_file(path.to_string_lossy().into_owned());
        for content in [None, Some("no certificate")] {
            if let Some(content) = content {
                std::fs::write(&path, content).unwrap();
            }
            let error = config(&roots).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().starts_with("AWS_CA_BUNDLE ("), "{error}");
            assert!(error.to_string().contains("none.pem"), "{error}");
        }
    }
}
