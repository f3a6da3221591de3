//! Which client is used, and why.

use crate::fixture::{Fixture, clients, library_path, search};
use hoistway_usrbio::{Error, Library, LibrarySearch, Preference, choose, probe};
use usrbiod::Faults;

#[test]
fn a_library_that_works_is_preferred_and_the_native_client_needs_none() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100_000);
    let chosen = choose(&path, Preference::Auto, &search()).unwrap();
    assert_eq!(chosen.mount.client().name(), "vendor");
    let nowhere = LibrarySearch::default().library("/nowhere/lib.so".into());
    let chosen = choose(&path, Preference::Auto, &nowhere).unwrap();
    assert_eq!(chosen.mount.client().name(), "native");
    assert!(chosen.reason.contains("/nowhere/lib.so"), "{}", chosen.reason);
    assert_eq!(choose(&path, Preference::Native, &search()).unwrap().mount.client().name(), "native");
    let error = choose(&path, Preference::Vendor, &nowhere).unwrap_err();
    assert!(matches!(&error, Error::NoLibrary { tried } if tried.len() == 1), "{error}");
}

#[test]
fn a_file_that_is_no_library_is_unusable() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let search = LibrarySearch::default().library(file.path().into());
    let error = Library::find(&search).unwrap_err();
    assert!(matches!(&error, Error::LibraryUnusable { library, .. } if library == file.path()), "{error}");
}

#[test]
fn a_library_is_found_in_a_directory_and_loaded_once() {
    let directories = vec!["/nowhere".into(), library_path().parent().unwrap().to_owned()];
    let search = LibrarySearch::default().directories(directories);
    let library = Library::find(&search).unwrap();
    assert!(std::sync::Arc::ptr_eq(&library, &Library::find(&search).unwrap()));
}

#[test]
fn a_daemon_that_reads_other_bytes_fails_the_probe() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100_000);
    fixture.daemon.behave(Faults { corrupt: true, ..Faults::default() }).unwrap();
    for client in clients() {
        let error = probe(&fixture.mount(client), &path).unwrap_err();
        assert!(
            matches!(&error, Error::ProbeFailed { reason, .. } if reason.contains("disagree")),
            "{error}"
        );
    }
}

#[test]
fn a_daemon_of_another_version_fails_the_probe() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100_000);
    fixture.daemon.behave(Faults { version_ahead: 1, ..Faults::default() }).unwrap();
    for client in clients() {
        let error = probe(&fixture.mount(client), &path).unwrap_err();
        assert!(
            matches!(&error, Error::ProbeFailed { reason, .. } if reason.contains("version 2")),
            "{error}"
        );
    }
}

#[test]
fn short_and_empty_files_pass_the_probe() {
    let Some(fixture) = Fixture::start() else { return };
    for client in clients() {
        let mount = fixture.mount(client);
        for len in [0, 1, 4095, 4096, 4097] {
            probe(&mount, &fixture.write(&format!("file{len}"), len)).unwrap();
        }
    }
}
