//! The file of the result: whole, or not there at all.

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

/// A file that is written without a name, and put in its place once it is whole. A process that is
/// killed before leaves nothing behind. Where a file system has no files without names, it has
/// another one beside its place meanwhile.
#[derive(Debug)]
pub(super) struct OutFile {
    path: PathBuf,
    file: File,
    /// The permissions that it has in the end, if it replaces a file of this user.
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
        // What a link leads to is replaced, and the link stays.
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

    /// Has a signal that ends this process remove the file.
    ///
    /// # Errors
    /// Why signals cannot be waited for.
    pub(super) fn remove_at_signal(&self) -> Result<(), Failure> {
        let cannot = |error: io::Error| Failure::of_host(cannot_wait(&error), &error);
        let runtime = racksum_net::runtime::single_threaded().map_err(cannot)?;
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

    /// A path at which other processes of this user can open it before it is in its place. Its
    /// name, if it has one, would lead elsewhere once another user of the folder has replaced it.
    pub(super) fn temporary(&self) -> PathBuf {
        open_at(&std::process::id().to_string(), &self.file)
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

/// Removes the name of a file that has not come to its place.
fn remove(name: &mut Option<PathBuf>) {
    if let Some(name) = name.take() {
        // It may be gone already; nothing better can be done about it here.
        drop(std::fs::remove_file(name));
    }
}

/// The permissions that a result keeps of the file that it replaces. Another user's file may have
/// been put there so that all may write to the result; and a result is no program, to run as
/// somebody else.
fn kept(user: u32, before: &Metadata) -> Option<Permissions> {
    let mode = before.permissions().mode() & 0o777;
    (before.uid() == user && is_known_user(user)).then(|| Permissions::from_mode(mode))
}

/// The permissions, but for the umask's, that a result is made with. Its owner may write to it; and
/// nobody may read it who could not read the file that it replaces, whosever that was.
fn at_first(before: Option<&Metadata>, keeps: bool) -> u32 {
    let others = match before {
        None => 0o066,
        // Not before it is whole.
        Some(_) if keeps => 0,
        Some(before) => before.permissions().mode() & 0o066,
    };
    0o600 | others
}

/// Where the result goes, and the file that is there, if there is one. A path is resolved before it
/// is checked, so that what is replaced is what was checked.
fn replaceable(path: &Path) -> Result<(PathBuf, Option<Metadata>), Failure> {
    let refused = |why: &str| Failure::usage(format!("--out {} {why}", path.display()));
    let cannot = |error| cannot_write(path, &error);
    // A file's name would be read without what follows it.
    if [&b"/"[..], b"/."].iter().any(|end| path.as_os_str().as_bytes().ends_with(end)) {
        return Err(refused("names no file"));
    }
    let mut place = path.to_owned();
    for links in 0..=MAX_LINKS {
        let folder = match folder_of(&place).canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound && links == 0 => {
                return Err(Failure::usage(format!(
                    "--out {}: there is no directory {}",
                    path.display(),
                    folder_of(path).display()
                )));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refused(NOTHING));
            }
            folder => folder.map_err(cannot)?,
        };
        // Some process has it open, as with /dev/stdout: it may be a file with a name, which must
        // not be replaced.
        if folder.starts_with("/proc") {
            return Err(refused(NO_FILE));
        }
        let Some(name) = place.file_name() else { return Err(refused("names no file")) };
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
            return Err(refused("names no file"));
        }
        if before.is_file() {
            return Ok((place, Some(before)));
        }
        if !before.is_symlink() {
            return Err(refused(NO_FILE));
        }
        place = followed(&place, &folder, &before).map_err(cannot)?;
    }
    Err(refused("is a link to more links than are followed"))
}

/// Where a link of a folder leads to, if this user may follow it.
fn followed(path: &Path, folder: &Path, link: &Metadata) -> io::Result<PathBuf> {
    let of = folder.metadata()?;
    if !may_follow(own_user(), link.uid(), of.uid(), of.mode()) {
        let why = "it is a link that another user has made in a folder that all may write to";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(folder.join(path.read_link()?))
}

/// Whether a user may follow a link, by the kernel's rule where `fs.protected_symlinks` is set: in
/// a folder such as `/tmp`, others make links to files that they may not write to themselves.
const fn may_follow(user: u32, owner: u32, folder_owner: u32, folder_mode: u32) -> bool {
    let is_of_all = folder_mode & 0o1002 == 0o1002;
    owner == user || owner == folder_owner || !is_of_all
}

/// Why a result could not be written.
pub(super) fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    Failure::of_path(format!("cannot write {}: {error}", path.display()), error)
}

/// Why a result goes only to where a file is, or nothing.
const NO_FILE: &str = "is a pipe or a device, and a result replaces only files";
/// Why a result does not go where a link leads that leads nowhere.
const NOTHING: &str = "is a link to nothing";
/// Links that the kernel follows from a path to its file.
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
    fn nobody_foresees_a_temporary_name_or_leads_ranks_astray_by_it() {
        let folder = folder("foresee");
        let path = folder.join("sum");
        let name = |out: &OutFile| locked(&out.name).clone().unwrap();
        let out = || OutFile::create_by(&path, |_, _| None).unwrap();
        let before = name(&out());
        let out = out();
        assert_ne!(name(&out), before, "which is free again");
        // Another user of the folder puts a link in the way of a rank that opens it.
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
            assert!(kept(before.uid() + 1, &before).is_none(), "of another user");
            assert_eq!(at_first(Some(&before), true), 0o600);
            assert_eq!(at_first(Some(&before), false), 0o640, "of another user: no wider");
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
        assert!(may_follow(user, other, user, 0o755), "only its owner makes links there");
        assert!(may_follow(user, other, root, 0o1775), "a team's");
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
            (folder.join("sum/"), "names no file"),
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
