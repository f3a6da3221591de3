//! Which certificates are trusted.

use crate::per_process::PerProcess;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{
    collections::HashMap,
    ffi::OsString,
    io,
    sync::{Arc, Mutex, PoisonError},
};

/// Whose roots are trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Roots {
    /// Those of this machine, or of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
    #[default]
    Machine,
    /// Those of a file, as `AWS_CA_BUNDLE` names one for servers of AWS and what speaks its protocol.
    File(String),
}

/// The variables that name roots of this machine.
const NAMES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Configurations by their roots, and what the variables said then.
type Configs = Mutex<HashMap<(Roots, [Option<OsString>; 2]), Arc<ClientConfig>>>;

/// The configuration of connections that trust these roots.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if there are none.
pub(super) fn config(roots: &Roots) -> io::Result<Arc<ClientConfig>> {
    static CONFIGS: PerProcess<Configs> = PerProcess::new();
    let mut configs = CONFIGS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let key = (roots.clone(), NAMES.map(std::env::var_os));
    if let Some(config) = configs.get(&key) {
        return Ok(config.clone());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(store(roots)?)
        .with_no_client_auth();
    Ok(configs.entry(key).or_insert(Arc::new(config)).clone())
}

fn store(roots: &Roots) -> io::Result<RootCertStore> {
    let (certificates, source, problems) = match roots {
        Roots::Machine => {
            let found = rustls_native_certs::load_native_certs();
            let named =
                NAMES.into_iter().filter_map(|name| Some(format!("{name} ({})", std::env::var(name).ok()?)));
            let named = named.collect::<Vec<_>>().join(" and ");
            let problems: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
            (found.certs, named, problems)
        }
        Roots::File(path) => {
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
        let roots = Roots::File(path.to_string_lossy().into_owned());
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
