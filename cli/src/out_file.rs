//! The output file, which appears complete or not at all.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use racksum_net::local::{is_known_user, own_user};

use crate::exit::Failure;
use crate::signals::{Ending, cannot_wait};
use crate::thread::spawn;
use crate::unnamed::{Unnamed, beside, folder_of, link, open_at, random, unnamed};

/// An output file that is written without a name and moved to its path once it is complete. A
/// killed process therefore leaves no partial file. On a file system without unnamed files, the
/// output has a temporary name in the same folder, and a killed process leaves that file behind.
#[derive(Debug)]
pub(crate) struct OutFile {
    path: PathBuf,
    file: File,
    /// Permissions of the finished file, if it replaces a file of this user.
    permissions: Option<Permissions>,
    name: Name,
}

/// The temporary name of a file, if it has one. Shared with the thread that removes the temporary
/// file when a signal ends this process.
type Name = Arc<Mutex<Option<PathBuf>>>;

impl OutFile {
    /// Creates the output file. It may replace any file, even an input.
    ///
    /// # Errors
    /// A message that names the file or folder and the problem.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        Self::create_by(path, unnamed)
    }

    /// Creates the output file, as an unnamed file if `unnamed` can create one.
    fn create_by(path: &Path, unnamed: Unnamed) -> Result<Self, Failure> {
        if path == Path::new("-") {
            return Err(Failure::usage(
                "the output - does not mean standard output, where the table is printed; name a \
                 file, such as ./-",
            ));
        }
        // The target of a link is replaced, and the link stays.
        let (path, before) = replaceable(path)?;
        let permissions = before.as_ref().and_then(|before| kept(own_user(), before));
        let mut options = File::options();
        options.read(true).write(true).mode(at_first(before.as_ref(), permissions.is_some()));
        let (name, file) = match unnamed(folder_of(&path), options.clone()) {
            Some(file) => (None, file),
            None => {
                let open = |name: &Path| options.clone().create_new(true).open(name);
                let made = beside(&path, random, open);
                let (name, file) = made.map_err(|error| cannot_write(&path, &error))?;
                (Some(name), file)
            }
        };
        Ok(Self { path, file, permissions, name: Arc::new(Mutex::new(name)) })
    }

    /// Starts a thread that removes the temporary file if a signal ends this process.
    ///
    /// # Errors
    /// A message for the user, if the process cannot wait for signals.
    pub(crate) fn remove_at_signal(&self) -> Result<(), Failure> {
        let cannot = |error: io::Error| Failure::of_host(cannot_wait(&error), &error);
        let runtime = racksum_net::runtime::single_threaded().map_err(cannot)?;
        let entered = runtime.enter();
        let mut signals = Ending::listen().map_err(cannot)?;
        drop(entered);
        let name = Arc::clone(&self.name);
        spawn(move || {
            let code = runtime.block_on(signals.next());
            // Hold the lock until the process ends, so that `place` cannot name the file again.
            let mut name = locked(&name);
            remove(&mut name);
            std::process::exit(code);
        })?;
        Ok(())
    }

    /// Returns the file for writing.
    pub(crate) const fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Returns a path at which other processes of this user can open the file before it is
    /// committed. The path does not use the temporary name, because another user of the folder
    /// could put another file under that name.
    pub(crate) fn temporary(&self) -> PathBuf {
        open_at(&std::process::id().to_string(), &self.file)
    }

    /// Moves the file to its path durably.
    ///
    /// # Errors
    /// A message for the user, if the move fails. In that case no temporary file remains.
    pub(crate) fn commit(self) -> Result<(), Failure> {
        let Self { path, file, permissions, .. } = &self;
        let permitted = permissions.clone().map_or(Ok(()), |it| file.set_permissions(it));
        permitted
            .and_then(|()| file.sync_all())
            .and_then(|()| self.place())
            .map_err(|error| cannot_write(path, &error))?;
        // Ignore errors: the file is in place, and some file systems cannot sync a folder.
        drop(File::open(folder_of(path)).and_then(|folder| folder.sync_all()));
        Ok(())
    }

    /// Moves the file to its path. Only a named file can replace an existing one, so an unnamed
    /// file first gets a temporary name.
    fn place(&self) -> io::Result<()> {
        let mut name = locked(&self.name);
        let temporary = match &*name {
            Some(temporary) => temporary,
            None => {
                let (temporary, ()) = beside(&self.path, random, |to| link(&self.file, to))?;
                name.insert(temporary)
            }
        };
        std::fs::rename(temporary, &self.path)?;
        *name = None;
        Ok(())
    }
}

impl Drop for OutFile {
    fn drop(&mut self) {
        remove(&mut locked(&self.name));
    }
}

fn locked(name: &Name) -> MutexGuard<'_, Option<PathBuf>> {
    name.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes the temporary name of a file that was not moved to its path.
fn remove(name: &mut Option<PathBuf>) {
    if let Some(name) = name.take() {
        // Ignore errors: someone else may have removed the file, and there is no remedy for other
        // errors.
        drop(std::fs::remove_file(name));
    }
}

/// Returns the permissions that a result keeps from the file that it replaces. Ignores another
/// user's file, which may have been planted so that everybody can write to the result. Drops
/// set-user-ID and set-group-ID, because a result must not run as another user.
fn kept(user: u32, before: &Metadata) -> Option<Permissions> {
    let mode = before.permissions().mode() & 0o777;
    (before.uid() == user && is_known_user(user)).then(|| Permissions::from_mode(mode))
}

/// Returns the mode with which a result is created, before the umask is applied. The result's owner
/// may always write to it. Users who could not read the replaced file cannot read the result
/// either, regardless of that file's owner.
fn at_first(before: Option<&Metadata>, keeps: bool) -> u32 {
    let others = match before {
        None => 0o066,
        // Other users get access only once the file is complete.
        Some(_) if keeps => 0,
        Some(before) => before.permissions().mode() & 0o066,
    };
    0o600 | others
}

/// Returns the path that the result goes to, and the metadata of the file there, if one exists.
/// Resolves links before the checks, so that the checked file is the one that is replaced.
fn replaceable(path: &Path) -> Result<(PathBuf, Option<Metadata>), Failure> {
    let refused = |why: &str| Failure::usage(format!("the output {} {why}", path.display()));
    let cannot = |error| cannot_write(path, &error);
    // Check these endings here, because `Path::file_name` ignores them.
    if [&b"/"[..], b"/."].iter().any(|end| path.as_os_str().as_bytes().ends_with(end)) {
        return Err(refused("does not name a file"));
    }
    let mut place = path.to_owned();
    for links in 0..=MAX_LINKS {
        let folder = match folder_of(&place).canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound && links == 0 => {
                return Err(Failure::usage(format!(
                    "cannot write {}: the directory {} does not exist",
                    path.display(),
                    folder_of(path).display()
                )));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refused(NOTHING));
            }
            folder => folder.map_err(cannot)?,
        };
        // A path under /proc, where /dev/stdout also leads, names a file that some process has
        // open. Such a file may also have a name elsewhere, and must not be replaced.
        if folder.starts_with("/proc") {
            return Err(refused(NO_FILE));
        }
        let Some(name) = place.file_name() else { return Err(refused("does not name a file")) };
        place = folder.join(name);
        let before = match place.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound && links == 0 => {
                return Ok((place, None));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refused(NOTHING));
            }
            before => before.map_err(cannot)?,
        };
        if before.is_dir() {
            return Err(refused("does not name a file"));
        }
        if before.is_file() {
            return Ok((place, Some(before)));
        }
        if !before.is_symlink() {
            return Err(refused(NO_FILE));
        }
        place = followed(&place, &folder, &before).map_err(cannot)?;
    }
    Err(refused("has too many symbolic links"))
}

/// Returns the target of a link in a folder, if this user may follow the link.
fn followed(path: &Path, folder: &Path, link: &Metadata) -> io::Result<PathBuf> {
    let of = folder.metadata()?;
    if !may_follow(own_user(), link.uid(), of.uid(), of.mode()) {
        let why = "it is another user's link in a folder that all users may write to";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(folder.join(path.read_link()?))
}

/// Returns whether a user may follow a link, by the kernel's rule for `fs.protected_symlinks`. In a
/// folder such as `/tmp`, other users could plant links to files that they cannot write to
/// themselves.
const fn may_follow(user: u32, owner: u32, folder_owner: u32, folder_mode: u32) -> bool {
    let is_of_all = folder_mode & 0o1002 == 0o1002;
    owner == user || owner == folder_owner || !is_of_all
}

/// Returns the failure for a result that could not be written.
pub(crate) fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    Failure::of_path(format!("cannot write {}: {error}", path.display()), error)
}

/// Reason to refuse a path to something other than a file.
const NO_FILE: &str = "is a pipe, a device or an open descriptor; name a regular file";
/// Reason to refuse a dangling link.
const NOTHING: &str = "is a dangling link";
/// Maximum number of links that the kernel follows from a path to its file.
const MAX_LINKS: u32 = 40;

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::exit::Exit;

    fn folder(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("racksum-out-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// The two ways to create a file: without a name, where this file system supports that, and
    /// with a temporary name.
    const WAYS: [Unnamed; 2] = [unnamed, |_, _| None];

    #[test]
    fn a_file_is_there_once_it_is_committed_and_replaces_what_was() {
        for unnamed in WAYS {
            let folder = folder("commit");
            let path = folder.join("sum");
            std::fs::write(&path, "before").unwrap();
            let mut out = OutFile::create_by(&path, unnamed).unwrap();
            out.file().write_all(b"after").unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"before");
            assert_eq!(std::fs::read(out.temporary()).unwrap(), b"after");
            out.commit().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"after");
            assert_eq!(names(&folder), ["sum"]);
            std::fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn nobody_foresees_a_temporary_name_or_leads_ranks_astray_by_it() {
        let folder = folder("foresee");
        let path = folder.join("sum");
        let name = |out: &OutFile| locked(&out.name).clone().unwrap();
        let out = || OutFile::create_by(&path, |_, _| None).unwrap();
        let before = name(&out());
        let out = out();
        assert_ne!(name(&out), before, "the first name is free again, but no name may repeat");
        // Another user of the folder replaces the temporary file with a link, to mislead a rank
        // that opens it.
        let target = folder.join("target");
        std::fs::write(&target, "kept").unwrap();
        std::fs::remove_file(name(&out)).unwrap();
        std::os::unix::fs::symlink(&target, name(&out)).unwrap();
        std::fs::write(out.temporary(), "sum").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"kept");
        drop(out);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_result_keeps_permissions_of_its_user_s_file_but_is_no_program_of_his() {
        for unnamed in WAYS {
            let folder = folder("setuid");
            let path = folder.join("sum");
            std::fs::write(&path, "before").unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o6751)).unwrap();
            let before = path.metadata().unwrap();
            assert_eq!(before.mode() & 0o7777, 0o6751);
            OutFile::create_by(&path, unnamed).unwrap().commit().unwrap();
            assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o751);
            assert!(kept(before.uid(), &before).is_some());
            assert!(kept(before.uid() + 1, &before).is_none(), "another user's file");
            assert_eq!(at_first(Some(&before), true), 0o600);
            assert_eq!(at_first(Some(&before), false), 0o640, "no wider than another user's file");
            assert_eq!(at_first(None, false), 0o666);
            std::fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn links_that_others_put_into_a_folder_of_all_are_not_followed() {
        let [user, other, root] = [1000, 1001, 0];
        assert!(may_follow(user, user, root, 0o1777));
        assert!(may_follow(user, root, root, 0o1777));
        assert!(!may_follow(user, other, root, 0o1777));
        assert!(!may_follow(root, other, root, 0o1777));
        assert!(
            may_follow(user, other, user, 0o755),
            "only the folder's owner can create links in it"
        );
        assert!(
            may_follow(user, other, root, 0o1775),
            "only the folder's group can create links in it"
        );
    }

    #[test]
    fn a_name_may_be_as_long_as_a_file_s_may_be() {
        let folder = folder("long");
        let path = folder.join("n".repeat(255));
        OutFile::create(&path).unwrap().commit().unwrap();
        assert!(path.exists());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_is_not_committed_leaves_nothing() {
        for unnamed in WAYS {
            let folder = folder("drop");
            let mut out = OutFile::create_by(&folder.join("sum"), unnamed).unwrap();
            out.file().write_all(b"half").unwrap();
            drop(out);
            assert_eq!(names(&folder), [""; 0]);
            std::fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn what_a_link_leads_to_is_replaced_with_its_permissions() {
        let folder = folder("link");
        let [path, link] = ["sum", "link"].map(|name| folder.join(name));
        std::fs::write(&path, "before").unwrap();
        // The replaced file is read-only even for its owner.
        std::fs::set_permissions(&path, Permissions::from_mode(0o440)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let mut out = OutFile::create(&link).unwrap();
        let mode = out.temporary().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "ranks can write to the temporary file");
        out.file().write_all(b"after").unwrap();
        out.commit().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"after");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o440);
        assert!(link.symlink_metadata().unwrap().is_symlink());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_device_and_a_link_to_nothing_are_not_replaced() {
        let folder = folder("keep");
        let nothing = folder.join("nothing");
        std::os::unix::fs::symlink(folder.join("none"), &nothing).unwrap();
        for (path, what) in
            [(&nothing, "a dangling link"), (&PathBuf::from("/dev/null"), "is a pipe, a device or")]
        {
            let why = OutFile::create(path).unwrap_err().to_string();
            assert!(why.contains(what), "{why}");
        }
        assert_eq!(names(&folder), ["nothing"]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_descriptor_s_file_is_not_replaced_by_its_name() {
        let folder = folder("descriptor");
        let [log, link] = ["log", "link"].map(|name| folder.join(name));
        let open = File::create(&log).unwrap();
        let number = open.as_raw_fd();
        let own = PathBuf::from(format!("/proc/self/fd/{number}"));
        std::os::unix::fs::symlink(&own, &link).unwrap();
        for path in [own, link, PathBuf::from(format!("/dev/fd/{number}"))] {
            let why = OutFile::create(&path).unwrap_err().to_string();
            assert!(why.contains("or an open descriptor; name a regular file"), "{why}");
        }
        // A file in shared memory has a name, so it is accepted.
        let shared = PathBuf::from(format!("/dev/shm/racksum-out-{}", std::process::id()));
        drop(OutFile::create(&shared).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_place_that_cannot_be_is_refused() {
        let folder = folder("refuse");
        for (path, what) in [
            (folder.clone(), "does not name a file"),
            (folder.join("none").join("sum"), " does not exist"),
            (PathBuf::from("/"), "does not name a file"),
            (folder.join("sum/"), "does not name a file"),
            (PathBuf::from("-"), "does not mean standard output"),
            (folder.join("n".repeat(256)), "File name too long"),
            (PathBuf::from("/dev/null/sum"), "Not a directory"),
        ] {
            let failure = OutFile::create(&path).unwrap_err();
            assert!(failure.why.contains(what), "{failure}");
            assert_eq!(failure.exit, Exit::USAGE, "{failure}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
