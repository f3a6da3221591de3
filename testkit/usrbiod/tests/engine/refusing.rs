//! Where USRBIO cannot be, a route that was named is an error, and `auto` says why it went another way.

use crate::{
    Model, by,
    common::{assert_is_file, mixed_model},
    fixture::library_path,
};
use hoistway::{DeviceId, DirectIo, Error, LoadOptions, Loaded, Route, UsrbioClient};
use std::path::PathBuf;
use usrbiod::{Faults, Options};

fn unavailable(result: hoistway::Result<Loaded>) -> (PathBuf, String, String) {
    match result.unwrap_err() {
        Error::RouteUnavailable { route: Route::Usrbio, path: Some(path), why } => {
            (path, why.reason, why.fix)
        }
        other => panic!("{other:?}"),
    }
}

/// What a load by `auto` says of USRBIO, having read by threads.
fn refused(model: &Model, options: &LoadOptions) -> String {
    let loaded = model.load(options).unwrap();
    assert_is_file(&loaded, &model.file);
    let report = loaded.report();
    assert!(report.carriers.iter().all(|carrier| carrier.route == Route::Threads), "{report}");
    let refusal = report.refused.iter().find(|refusal| refusal.what == "usrbio");
    refusal.unwrap_or_else(|| panic!("{report}")).why.reason.clone()
}

const HOST: DeviceId = DeviceId::Cpu;

#[test]
fn a_file_elsewhere_is_refused_and_auto_has_nothing_to_say() {
    let _turn = crate::turn();
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, file) = mixed_model(disk.path());
    for device in crate::common::devices() {
        let named = hoistway::load(&[&path], &by(Route::Usrbio, UsrbioClient::Auto, device));
        let (at, reason, fix) = unavailable(named);
        assert_eq!((at, fix.as_str()), (path.clone(), "choose route auto"));
        assert!(reason.contains("not on a 3FS"), "{reason}");
    }
    let loaded = hoistway::load(&[&path], &by(Route::Auto, UsrbioClient::Auto, HOST)).unwrap();
    assert_is_file(&loaded, &file);
    assert!(!loaded.report().to_string().contains("usrbio"), "{}", loaded.report());
}

#[test]
fn one_file_elsewhere_among_those_on_a_3fs_is_named() {
    let Some(model) = Model::start() else { return };
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = disk.path().join("other.safetensors");
    let tensors = [crate::common::tensor("other", hoistway::Dtype::U8, &[100])];
    crate::common::write_model(&path, &tensors, 0, 1);
    let options = by(Route::Usrbio, UsrbioClient::Native, HOST);
    assert_eq!(unavailable(hoistway::load(&[&model.path, &path], &options)).0, path);
}

/// Runs a test again in a process that has not met the vendor's library. `true` in that process.
fn is_without_library(test: &str) -> bool {
    const MARK: &str = "ENGINE_TEST_WITHOUT_LIBRARY";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let program = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(program);
    command.args(["--exact", test, "--nocapture"]).env(MARK, "1");
    let status = command.env_remove("LD_LIBRARY_PATH").env_remove("HF3FS_LIB_DIR").status().unwrap();
    assert!(status.success(), "{status}");
    false
}

#[test]
fn auto_says_which_client_reads_and_why_the_other_does_not() {
    if !is_without_library("refusing::auto_says_which_client_reads_and_why_the_other_does_not") {
        return;
    }
    let Some(model) = Model::start() else { return };
    let without = (by(Route::Auto, UsrbioClient::Auto, HOST)).usrbio_directories(Vec::new());
    let loaded = model.load(&without).unwrap();
    let report = loaded.report();
    let refusal =
        report.refused.iter().find(|refusal| refusal.what == "usrbio by the vendor's library").unwrap();
    assert!(refusal.why.reason.contains("libhf3fs_api_shared.so was not found"), "{refusal:?}");
    assert!(refusal.why.reason.contains("own client reads"), "{refusal:?}");
    assert!(report.notes.iter().any(|note| note.contains("by the native client")), "{:?}", report.notes);

    let named = without.route(Route::Usrbio).usrbio(UsrbioClient::Vendor);
    let (at, reason, fix) = unavailable(model.load(&named));
    assert_eq!((at, fix.as_str()), (model.path.clone(), "choose usrbio=native"));
    assert!(reason.contains("HF3FS_LIB_DIR"), "{reason}");

    let directory = library_path().parent().unwrap().to_owned();
    let with = (by(Route::Auto, UsrbioClient::Auto, HOST)).usrbio_directories(vec![directory]);
    let loaded = model.load(&with).unwrap();
    let report = loaded.report();
    assert!(report.notes.iter().any(|note| note.contains("by the vendor client")), "{:?}", report.notes);
    assert!(report.refused.iter().all(|refusal| !refusal.what.contains("usrbio")), "{report}");
}

#[test]
fn a_mount_that_cannot_be_written_to_is_read_by_threads_and_said_so() {
    let Some(model) = Model::start_with(&Options { read_only: true, ..Options::default() }) else { return };
    let reason = refused(&model, &by(Route::Auto, UsrbioClient::Native, HOST));
    assert!(reason.contains("read-only"), "{reason}");
    let (_, reason, _) = unavailable(model.load(&by(Route::Usrbio, UsrbioClient::Native, HOST)));
    assert!(reason.contains("mount it read-write"), "{reason}");
}

#[test]
fn a_daemon_that_gives_other_bytes_than_pread_is_not_trusted() {
    let Some(model) = Model::start() else { return };
    model.fixture.daemon.behave(Faults { corrupt: true, ..Faults::default() }).unwrap();
    for client in [UsrbioClient::Native, UsrbioClient::Vendor] {
        let reason = refused(&model, &by(Route::Auto, client, HOST));
        assert!(reason.contains("disagree"), "{reason}");
        let (at, reason, _) = unavailable(model.load(&by(Route::Usrbio, client, HOST)));
        assert_eq!(at, model.path);
        assert!(reason.contains("disagree"), "{reason}");
    }
    // Nothing of that is remembered.
    model.fixture.daemon.behave(Faults::default()).unwrap();
    assert_is_file(&model.load(&by(Route::Usrbio, UsrbioClient::Native, HOST)).unwrap(), &model.file);
}

#[test]
fn what_is_asked_of_auto_may_rule_usrbio_out() {
    let Some(model) = Model::start() else { return };
    let options = by(Route::Auto, UsrbioClient::Native, HOST);
    let never = options.clone().direct(DirectIo::Never);
    assert!(refused(&model, &never).contains("direct=never"));
    let named = never.route(Route::Usrbio);
    let error = model.load(&named).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "direct", .. }), "{error:?}");

    // POSIX is there where it is asked for.
    let threads = model.load(&by(Route::Threads, UsrbioClient::Auto, HOST)).unwrap();
    assert_is_file(&threads, &model.file);
    assert!(!threads.report().to_string().contains("usrbio"), "{}", threads.report());
}

#[test]
fn doctor_says_whether_usrbio_works_on_a_path() {
    if !is_without_library("refusing::doctor_says_whether_usrbio_works_on_a_path") {
        return;
    }
    let Some(model) = Model::start() else { return };
    let finding = || {
        let checks = hoistway::doctor::examine(&[&model.path]);
        checks.into_iter().find(|check| check.name.ends_with(": usrbio")).unwrap()
    };
    let check = finding();
    assert_eq!(check.status, hoistway::doctor::Status::Ok, "{check:?}");
    assert!(check.finding.contains("native client"), "{check:?}");
    model.fixture.daemon.behave(Faults { version_ahead: 1, ..Faults::default() }).unwrap();
    model.fixture.daemon.restart().unwrap();
    let check = finding();
    assert_eq!(check.status, hoistway::doctor::Status::Slower, "{check:?}");
    assert!(check.finding.contains("version"), "{check:?}");
}
