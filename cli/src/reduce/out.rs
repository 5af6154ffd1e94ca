//! The file of the result: whole, or not there at all.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::exit::Failure;
use crate::signals::{Ending, cannot_wait};
use crate::thread::spawn;
use crate::unnamed::{Unnamed, beside, folder_of, link, open_at, unnamed};

/// A file that is written without a name, and put in its place once it is whole. A process that is
/// killed before leaves nothing behind. Where a file system has no files without names, it has
/// another one beside its place meanwhile.
#[derive(Debug)]
pub(super) struct OutFile {
    path: PathBuf,
    file: File,
    /// Whose permissions it has in the end, if it replaces a file.
    permissions: Option<Permissions>,
    name: Name,
}

/// The name that a file has before it is in its place, if any. Shared with the thread that removes
/// it at a signal.
type Name = Arc<Mutex<Option<PathBuf>>>;

impl OutFile {
    /// Makes the file. An input may be replaced, as any other file that is named.
    ///
    /// # Errors
    /// A sentence that names the file or folder and what is wrong with it.
    pub(super) fn create(path: &Path) -> Result<Self, Failure> {
        Self::create_by(path, unnamed)
    }

    /// Makes the file without a name if `unnamed` can.
    fn create_by(path: &Path, unnamed: Unnamed) -> Result<Self, Failure> {
        if path == Path::new("-") {
            return Err(Failure::usage(
                "--out - is not standard output, where the table goes; name a file, be it ./-",
            ));
        }
        let before = replaceable(path)?;
        // What a link leads to is replaced, and the link stays.
        let path = &match &before {
            Some(_) => path.canonicalize().map_err(|error| cannot_write(path, &error))?,
            None => path.to_owned(),
        };
        if path.file_name().is_none() || path.is_dir() {
            return Err(Failure::usage(format!("--out {} names no file", path.display())));
        }
        let folder = folder_of(path);
        if !folder.is_dir() {
            return Err(Failure::usage(format!(
                "--out {}: there is no directory {}",
                path.display(),
                folder.display()
            )));
        }
        let mut options = File::options();
        options.read(true).write(true);
        // Until it is whole, ranks open it to write, and nobody else may read more of it.
        if before.is_some() {
            options.mode(0o600);
        }
        let (name, file) = match unnamed(folder, options.clone()) {
            Some(file) => (None, file),
            None => {
                let open = |name: &Path| options.clone().create_new(true).open(name);
                let (name, file) =
                    beside(path, open).map_err(|error| cannot_write(path, &error))?;
                (Some(name), file)
            }
        };
        let permissions = before.map(|before| before.permissions());
        Ok(Self { path: path.clone(), file, permissions, name: Arc::new(Mutex::new(name)) })
    }

    /// Has a signal that ends this process remove the file.
    ///
    /// # Errors
    /// Why signals cannot be waited for.
    pub(super) fn remove_at_signal(&self) -> Result<(), Failure> {
        let cannot = |error| Failure::failed(cannot_wait(&error));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(cannot)?;
        let entered = runtime.enter();
        let mut signals = Ending::listen().map_err(cannot)?;
        drop(entered);
        let name = Arc::clone(&self.name);
        spawn(move || {
            let code = runtime.block_on(signals.next());
            // Held until the process has ended, so that it gets no name any more.
            let mut name = locked(&name);
            remove(&mut name);
            std::process::exit(code);
        })?;
        Ok(())
    }

    /// The file, to be written.
    pub(super) const fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// A path at which other processes of this user can open it before it is in its place.
    pub(super) fn temporary(&self) -> PathBuf {
        let name = locked(&self.name).clone();
        name.unwrap_or_else(|| open_at(&std::process::id().to_string(), &self.file))
    }

    /// Puts the file in its place, durably.
    ///
    /// # Errors
    /// Why it cannot be; nothing is left behind then.
    pub(super) fn commit(self) -> Result<(), Failure> {
        let Self { path, file, permissions, .. } = &self;
        let permitted = permissions.clone().map_or(Ok(()), |it| file.set_permissions(it));
        permitted
            .and_then(|()| file.sync_all())
            .and_then(|()| self.place())
            .map_err(|error| cannot_write(path, &error))?;
        // The name is there; a file system that cannot say so durably is no reason to fail.
        drop(File::open(folder_of(path)).and_then(|folder| folder.sync_all()));
        Ok(())
    }

    /// Gives the file its place. One that is there can be replaced only by one with a name.
    fn place(&self) -> io::Result<()> {
        let mut name = locked(&self.name);
        let temporary = match &*name {
            Some(temporary) => temporary,
            None => {
                let (temporary, ()) = beside(&self.path, |to| link(&self.file, to))?;
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

/// Removes the name of a file that has not come to its place.
fn remove(name: &mut Option<PathBuf>) {
    if let Some(name) = name.take() {
        // It may be gone already; nothing better can be done about it here.
        drop(std::fs::remove_file(name));
    }
}

/// What is known of the file that the result would replace, if there is one.
fn replaceable(path: &Path) -> Result<Option<Metadata>, Failure> {
    let refused = |why: &str| Failure::usage(format!("--out {} {why}", path.display()));
    let no_file = "is a pipe or a device, and a result replaces only files";
    if is_descriptor(path) {
        return Err(refused(no_file));
    }
    let before = match std::fs::metadata(path) {
        Ok(before) => before,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let dangling = path.symlink_metadata().is_ok();
            return if dangling { Err(refused("is a link to nothing")) } else { Ok(None) };
        }
        Err(error) => return Err(cannot_write(path, &error)),
    };
    if before.is_dir() {
        return Err(refused("names no file"));
    }
    if !before.is_file() {
        return Err(refused(no_file));
    }
    Ok(Some(before))
}

/// Whether a path leads to a file that some process has open, as `/dev/stdout` does, or elsewhere
/// into `/proc`. The file that is open there may have a name, which must not be replaced.
fn is_descriptor(path: &Path) -> bool {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(folder) = folder_of(&path).canonicalize() else { return false };
        if folder.starts_with("/proc") {
            return true;
        }
        let Ok(target) = std::fs::read_link(&path) else { return false };
        path = folder.join(target);
    }
    // The kernel follows no more of them either.
    false
}

/// Why a result could not be written.
pub(super) fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    Failure::of_path(format!("cannot write {}: {error}", path.display()), error)
}

/// Links that the kernel follows from a path to its file.
const MAX_LINKS: u32 = 40;
#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::exit::Exit;
    use crate::unnamed::ATTEMPTS;

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

    /// With files that have no name, where this file system has them, and with others.
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
    fn names_that_are_in_the_way_are_passed_over() {
        for unnamed in WAYS {
            let folder = folder("way");
            let path = folder.join("sum");
            let hidden =
                |attempt| folder.join(format!(".sum.{}-{attempt}.tmp", std::process::id()));
            for attempt in 0..ATTEMPTS - 1 {
                std::fs::write(hidden(attempt), "another's").unwrap();
            }
            OutFile::create_by(&path, unnamed).unwrap().commit().unwrap();
            std::fs::write(hidden(ATTEMPTS - 1), "another's").unwrap();
            let out = OutFile::create_by(&path, unnamed).and_then(OutFile::commit);
            let why = out.unwrap_err().to_string();
            assert!(why.contains("16 temporary files are in the way"), "{why}");
            assert_eq!(std::fs::read(hidden(0)).unwrap(), b"another's");
            std::fs::remove_dir_all(folder).unwrap();
        }
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
        // Not even its owner may write to it.
        std::fs::set_permissions(&path, Permissions::from_mode(0o440)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let mut out = OutFile::create(&link).unwrap();
        let mode = out.temporary().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "ranks write to it");
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
            [(&nothing, "a link to nothing"), (&PathBuf::from("/dev/null"), "a pipe or a device")]
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
            assert!(why.contains("is a pipe or a device, and a result replaces only"), "{why}");
        }
        // What is in memory only has a name as well.
        let shared = PathBuf::from(format!("/dev/shm/racksum-out-{}", std::process::id()));
        drop(OutFile::create(&shared).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_place_that_cannot_be_is_refused() {
        let folder = folder("refuse");
        for (path, what) in [
            (folder.clone(), "names no file"),
            (folder.join("none").join("sum"), "there is no directory"),
            (PathBuf::from("/"), "names no file"),
            (PathBuf::from("-"), "is not standard output"),
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
