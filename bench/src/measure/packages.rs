//! Two versions of packages of binaries, as the archives of Debian have them: files of which a part has moved.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::measure::pair::LIMIT;
use crate::measure::process::{command, quote, run, shell};

/// Packages of binaries of which the archives have two versions, and kernels with their modules.
pub(crate) const PACKAGES: [&str; 6] =
    ["git", "libc6", "libssl3", "libcurl4", "libxml2", "libpython3.11-minimal"];
pub(crate) const KERNELS: &str = "^linux-image-6.1.0-[0-9]+-cloud-amd64$";

/// Two versions of a package of binaries, unpacked and joined to one file each, with the number of files.
pub(crate) fn versions(folder: &Path, name: &str) -> Result<Option<(PathBuf, PathBuf, usize)>> {
    let wanted: Vec<String> = if name.starts_with('^') {
        let found = run(command("apt-cache").args(["search", "--names-only", name]), LIMIT)?;
        let mut names: Vec<String> =
            found.stdout.lines().filter_map(|line| Some(line.split(' ').next()?.to_string())).collect();
        names.sort_by_key(|name| (name.len(), name.clone()));
        names.split_off(names.len().saturating_sub(2))
    } else {
        let found = run(command("apt-cache").args(["madison", name]), LIMIT)?;
        let mut versions: Vec<&str> =
            found.stdout.lines().filter_map(|line| line.split('|').nth(1)).map(str::trim).collect();
        // The newest stands first.
        versions.dedup();
        versions.truncate(2);
        versions.into_iter().rev().map(|version| format!("{name}={version}")).collect()
    };
    let [old, new] = &wanted[..] else { return Ok(None) };
    let mut joined = Vec::new();
    let mut count = 0;
    for (at, package) in [old, new].into_iter().enumerate() {
        let place = folder.join(format!("package-{at}"));
        if place.exists() {
            std::fs::remove_dir_all(&place)?;
        }
        std::fs::create_dir_all(&place)?;
        run(command("apt-get").args(["-qq", "download", package]).current_dir(&place), LIMIT)?;
        let file = folder.join(format!("joined-{at}"));
        // In the order of their names, as an archive has them.
        let line = format!(
            "cd {} && dpkg -x *.deb all && rm *.deb && find all -type f \\( -name '*.ko' -o -name '*.so*' -o -perm /111 \\) \
             | LC_ALL=C sort | tee list | xargs -d '\\n' cat > {} && wc -l < list",
            quote(&place),
            quote(&file)
        );
        count = run(&mut shell(&line), LIMIT)?.stdout.trim().parse().unwrap_or(0);
        joined.push(file);
    }
    let mut joined = joined.into_iter();
    Ok(joined.next().zip(joined.next()).map(|(old, new)| (old, new, count)))
}
