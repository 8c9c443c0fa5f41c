//! `cargo run -p ubtrfs-xtask -- tidy`
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some("tidy") {
        eprintln!("usage: xtask tidy");
        return ExitCode::from(2);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match ubtrfs_xtask::tidy(&root) {
        Ok(report) => {
            eprint!("{report}");
            ExitCode::from(u8::from(!report.is_clean()))
        }
        Err(error) => {
            eprintln!("xtask: tidy: {error}");
            ExitCode::from(4)
        }
    }
}
