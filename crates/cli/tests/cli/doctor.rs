//! `pinpool doctor` on this machine, under small limits, with the mock driver, with a stub of libcuda, and in a cgroup.
#![allow(clippy::print_stdout)] // Says what was skipped.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::process::Command;

use serde_json::Value;

#[cfg(feature = "cuda")]
use crate::load::mock_driver;
use crate::tool::{finish, pinpool, scratch};

/// `doctor` on the backend that it selects.
fn doctor(args: &[&str]) -> Command {
    let mut command = pinpool(&["doctor"]);
    command.args(args).env_remove("PINPOOL_BACKEND").env_remove("CUDA_VISIBLE_DEVICES");
    command
}

/// Returns the JSON object, and checks that its status is the exit status.
fn diagnosis(command: &mut Command) -> Value {
    let ran = finish(command.arg("--json"));
    let diagnosis: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {}", ran.stdout));
    assert_eq!(diagnosis["status"], ran.code(), "{diagnosis}");
    diagnosis
}

/// Returns level, text and remedy of the finding with this name.
fn finding<'a>(diagnosis: &'a Value, check: &str) -> (&'a str, &'a str, &'a str) {
    let found = diagnosis["findings"].as_array().unwrap().iter().find(|finding| finding["check"] == check);
    let found = found.unwrap_or_else(|| panic!("no {check} in {diagnosis}"));
    let [level, text, remedy] = ["level", "found", "remedy"].map(|key| found[key].as_str().unwrap_or_default());
    (level, text, remedy)
}

#[test]
fn every_check_is_reported_once_with_a_level_and_a_remedy_if_needed() {
    let diagnosis = diagnosis(doctor(&["--reserve", "1M"]).env("PINPOOL_MAX_BYTES", "64M"));
    let findings = diagnosis["findings"].as_array().unwrap();
    let checks: Vec<_> = findings.iter().map(|finding| finding["check"].as_str().unwrap()).collect();
    let expected = "settings gpu vmm register cuda mlock heap choice limit numa huge-pages locked-memory address-space open-files \
                    threads mappings memory overcommit pressure shared-limit speed reserve result";
    assert_eq!(checks.join(" "), expected);
    for finding in findings {
        let level = finding["level"].as_str().unwrap();
        assert!(["ok", "note", "warning", "error"].contains(&level), "{finding}");
        assert!(!finding["found"].as_str().unwrap().is_empty(), "{finding}");
        assert!(finding["remedy"].is_string() || ["ok", "note"].contains(&level), "nothing to do: {finding}");
    }
    let keys: Vec<_> = diagnosis.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys.join(" "), "status device backend pinned_by gpu max_bytes reserve findings");
    assert_eq!(diagnosis["max_bytes"], 64 << 20);
    let reserve = &diagnosis["reserve"];
    assert_eq!((&reserve["bytes"], &reserve["fits"]), (&Value::from(1 << 20), &Value::from(true)), "{diagnosis}");
    assert!(reserve["seconds"].as_f64().unwrap() > 0.0);
    // The reserve fits, so the exit status depends only on the GPU.
    assert_eq!(diagnosis["status"] == 0, diagnosis["gpu"] == true);
    assert_eq!(finding(&diagnosis, "result").0 == "ok", diagnosis["gpu"] == true);
}

#[test]
fn the_text_is_aligned_and_has_each_remedy_below_its_finding() {
    let ran = finish(&mut doctor(&["--reserve", "1000G"])).exits(1);
    let lines: Vec<_> = ran.stdout.lines().collect();
    let at = lines.iter().position(|line| line.starts_with("reserve ")).unwrap();
    assert!(lines[at].contains("error") && lines[at].contains("1000.0GiB exceeds the limit"), "{}", ran.stdout);
    let (indent, remedy) = lines[at + 1].split_at(lines[at].find("1000.0GiB").unwrap());
    assert!(indent.bytes().all(|byte| byte == b' ') && remedy.starts_with("-> lower the reserve"), "{}", ran.stdout);
    assert!(lines.last().is_some_and(|line| !line.is_empty()));
}

#[test]
fn bad_settings_exit_with_2() {
    let bad = diagnosis(doctor(&[]).env("PINPOOL_MAX_BYTES", "2X").env("PINPOOL_MAXBYTES", "1"));
    assert_eq!(bad["status"], 2);
    let settings: Vec<_> = bad["findings"].as_array().unwrap().iter().filter(|of| of["check"] == "settings").collect();
    let texts: Vec<_> =
        settings.iter().map(|of| (of["level"].as_str().unwrap(), of["found"].as_str().unwrap())).collect();
    let [("warning", unknown), ("error", refused)] = texts.as_slice() else { panic!("{texts:?}") };
    assert!(unknown.contains("PINPOOL_MAXBYTES=1") || refused.contains("PINPOOL_MAX_BYTES=2X"), "{texts:?}");

    let contradiction = diagnosis(doctor(&[]).env("PINPOOL_MAX_BYTES", "1G").env("PINPOOL_RESERVE", "8G"));
    assert_eq!(contradiction["status"], 2);
    let (level, text, _) = finding(&contradiction, "settings");
    assert!(level == "error" && text.contains("exceeds PINPOOL_MAX_BYTES"), "{text}");
    let of_a_preset = diagnosis(doctor(&[]).env("PINPOOL_BACKEND", "vmm").env("PINPOOL_PRESET", "tensorflow"));
    assert_eq!(of_a_preset["status"], 2, "{of_a_preset}");
    // A planned reserve (`--reserve`) does not contradict the settings.
    let planned = diagnosis(doctor(&["--reserve", "8G"]).env("PINPOOL_MAX_BYTES", "1G"));
    assert_eq!((&planned["status"], &planned["reserve"]["fits"]), (&Value::from(1), &Value::from(false)));

    for wrong in [&["--reserve", "12 bananas"][..], &["--device", "first"], &["--frobnicate"]] {
        assert_eq!(finish(&mut doctor(wrong)).code(), 2, "{wrong:?}");
    }
}

#[test]
fn what_the_machine_lacks_for_a_setting_is_named() {
    let (dir, other) = scratch("t");
    fs::write(&other, "precious").unwrap();
    let link = dir.path().join("link");
    symlink("absent", &link).unwrap();
    let [folder, other, link] = [dir.path(), &other, &link].map(|path| path.to_str().unwrap());
    for (variable, value, level, words) in [
        ("PINPOOL_NUMA_NODE", "99", "warning", "PINPOOL_NUMA_NODE=99: this machine has the nodes ["),
        ("PINPOOL_SOCKET", "/nonexistent/y", "warning", "PINPOOL_SOCKET: the directory /nonexistent does not exist"),
        ("PINPOOL_TRACE", "/nonexistent/t", "error", "PINPOOL_TRACE: the directory /nonexistent does not exist"),
        ("PINPOOL_TRACE", other, "error", "t cannot be written: it holds 8 bytes that are not a recording"),
        ("PINPOOL_TRACE", link, "error", "link cannot be written: it is a symbolic link"),
        ("PINPOOL_TRACE", folder, "error", " cannot be written: it is a directory"),
        ("PINPOOL_TRACE", "/dev/tty", "error", "/dev/tty cannot be written: it is a device or a socket"),
        ("PINPOOL_TRACE", "/dev/null", "ok", "PINPOOL_TRACE=/dev/null"),
    ] {
        let found = diagnosis(doctor(&[]).env(variable, value));
        let (found_level, text, _) = finding(&found, "settings");
        assert!(found_level == level && text.contains(words), "{variable}={value}: {text}");
        assert_eq!(found["status"] == 2, level == "error", "{found}");
    }
    assert_eq!(fs::read_to_string(other).unwrap(), "precious");
}

/// Lowers a limit of the process, and drops the capability that would exempt root.
#[allow(unsafe_code)] // Runs between fork and exec.
pub(crate) fn under_limit(command: &mut Command, resource: libc::__rlimit_resource_t, value: u64) -> &mut Command {
    let lower = move || {
        let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
        // SAFETY: the call reads `limit`, which outlives the call.
        if unsafe { libc::setrlimit(resource, &raw const limit) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        const CAP_IPC_LOCK: libc::c_ulong = 14;
        // SAFETY: the call takes numbers. It fails if this process is not root.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK) };
        Ok(())
    };
    // SAFETY: `lower` only makes system calls, which are safe between fork and exec.
    unsafe { command.pre_exec(lower) }
}

#[test]
fn a_low_limit_of_locked_memory_is_named_with_its_remedy() {
    let mut command = doctor(&[]);
    let diagnosis = diagnosis(under_limit(&mut command, libc::RLIMIT_MEMLOCK, 64 << 10));
    if diagnosis["backend"] != "heap" {
        println!("skipped: RLIMIT_MEMLOCK does not bind this process, or there is a GPU");
        return;
    }
    assert!(diagnosis["status"] == 1 && diagnosis["pinned_by"].is_null() && diagnosis["gpu"] == false, "{diagnosis}");
    let (level, text, remedy) = finding(&diagnosis, "choice");
    assert!(level == "warning" && text.contains("auto selects heap: not pinned") && text.contains("64.0KiB"), "{text}");
    assert!(remedy.contains("ulimit -l") && remedy.contains("LimitMEMLOCK"), "{remedy}");
    let (level, text, _) = finding(&diagnosis, "locked-memory");
    assert!(level == "warning" && text.contains("64.0KiB"), "{text}");
    let (level, text, remedy) = finding(&diagnosis, "mlock");
    assert!(level == "warning" && text.contains("RLIMIT_MEMLOCK is 64.0KiB") && remedy.contains("ulimit -l"), "{text}");
}

#[test]
fn other_low_limits_are_named_too() {
    for (resource, value, check, remedy) in [
        (libc::RLIMIT_NOFILE, 16, "open-files", "ulimit -n"),
        (libc::RLIMIT_NPROC, 100, "threads", "ulimit -u"),
        (libc::RLIMIT_AS, 400 << 20, "address-space", "ulimit -v"),
    ] {
        let mut command = doctor(&[]);
        command.env("PINPOOL_MAX_BYTES", "1G");
        let diagnosis = diagnosis(under_limit(&mut command, resource, value));
        let (level, _, found) = finding(&diagnosis, check);
        assert!(level == "warning" && found.contains(remedy), "{check}: {found}");
    }
}

/// Runs with the mock driver as libcuda.
#[cfg(feature = "cuda")]
#[test]
fn with_a_driver_there_is_pinned_memory_for_the_gpu() {
    let folder = tempfile::tempdir().unwrap();
    mock_driver(folder.path());
    let with = |args: &[&str]| {
        let mut command = doctor(args);
        command.env("LD_LIBRARY_PATH", folder.path()).env("PINPOOL_MAX_BYTES", "1G");
        command
    };
    let ready = diagnosis(&mut with(&["--reserve", "64M"]));
    assert_eq!((&ready["status"], &ready["backend"]), (&0.into(), &"vmm".into()));
    assert!(ready["pinned_by"] == "driver" && ready["gpu"] == true, "{ready}");
    assert!(ready["reserve"]["fits"] == true && ready["reserve"]["seconds"].as_f64().unwrap() > 0.0, "{ready}");
    for check in ["gpu", "vmm", "register", "cuda", "choice", "result"] {
        assert_eq!(finding(&ready, check).0, "ok", "{ready}");
    }
    assert!(finding(&ready, "gpu").1.contains("mock driver"), "{ready}");

    let elsewhere = diagnosis(&mut with(&["--device", "3"]));
    assert_eq!((&elsewhere["status"], &elsewhere["device"], &elsewhere["gpu"]), (&1.into(), &3.into(), &false.into()));
    let (level, text, remedy) = finding(&elsewhere, "gpu");
    assert!(level == "warning" && text.contains("no GPU 3") && remedy.contains("PINPOOL_DEVICE"), "{text}");

    let otherwise = diagnosis(with(&[]).env("PINPOOL_BACKEND", "heap"));
    let (level, text, remedy) = finding(&otherwise, "result");
    assert!(otherwise["status"] == 1 && level == "error" && remedy.contains("PINPOOL_BACKEND=auto"), "{text}");

    let without_room = diagnosis(&mut with(&["--reserve", "2G"]));
    assert_eq!((&without_room["status"], &without_room["gpu"]), (&1.into(), &true.into()), "{without_room}");
    let (level, text, _) = finding(&without_room, "result");
    assert!(level == "error" && text == "pinned memory for GPU 0, by vmm, but reserve failed", "{text}");
}

/// A driver that crashes or hangs is a finding, and the other checks continue.
#[cfg(feature = "cuda")]
#[test]
fn a_driver_that_crashes_or_hangs_is_a_finding() {
    let folder = tempfile::tempdir().unwrap();
    mock_driver(folder.path());
    let with = |variable: &str, call: &str| {
        let mut command = doctor(&["--timeout", "15s"]);
        command.env("LD_LIBRARY_PATH", folder.path()).env(variable, call).env("PINPOOL_MAX_BYTES", "1G");
        diagnosis(&mut command)
    };
    let of_vmm = with("MOCK_DRIVER_ABORT", "cuMemCreate");
    let (level, text, remedy) = finding(&of_vmm, "vmm");
    assert!(level == "error" && text.contains("was ended by signal: 6 (SIGABRT)"), "{text}");
    assert!(remedy.contains("PINPOOL_BACKEND=register"), "{remedy}");
    assert_eq!((finding(&of_vmm, "register").0, finding(&of_vmm, "cuda").0), ("ok", "ok"));
    assert_eq!((&of_vmm["status"], &of_vmm["backend"]), (&1.into(), &"register".into()), "auto would end the process");
    assert!(finding(&of_vmm, "choice").1.contains("not vmm: the process that tried it was ended"), "{of_vmm}");

    let hangs = with("MOCK_DRIVER_HANG", "cuMemMap");
    assert!(finding(&hangs, "vmm").1.contains("did not end within 15.0s"), "{hangs}");
    assert_eq!(hangs["backend"], "register");

    let of_all = with("MOCK_DRIVER_ABORT", "cuDeviceGetCount");
    assert!(finding(&of_all, "gpu").1.contains("SIGABRT"), "{of_all}");
    for name in ["vmm", "register", "cuda"] {
        assert_eq!(finding(&of_all, name).0, "note", "{of_all}");
    }
    assert_eq!((&of_all["status"], &of_all["gpu"]), (&1.into(), &false.into()));
}
