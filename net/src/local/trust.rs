//! Trust in the process that listens at a path.
//!
//! A path in a shared folder belongs to the first process that binds it. So a caller trusts
//! processes of its own user and of root. It also trusts processes of the user who owns the path's
//! folder, if no other user can put a socket in it. Users are told apart only by the user ids that
//! the kernel reports.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use super::call_error::CallError;
use super::is_known_user;

/// Limit on the symbolic links that a path passes through; the kernel has the same limit.
const MAX_LINKS: usize = 40;

/// Mode bits that let users other than the owner create files in a folder. An access control list
/// that lets others do so also sets the group bits.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Checks that a caller of user `own` may trust a process of user `listener` at a path.
///
/// # Errors
/// Returns [`CallError::Untrusted`], or the kernel's error if the path cannot be read.
pub(super) fn check(listener: u32, path: &Path, own: u32) -> Result<(), CallError> {
    let trusted: BTreeSet<u32> = [0, own].into_iter().filter(|uid| is_known_user(*uid)).collect();
    if trusted.contains(&listener) {
        return Ok(());
    }
    let why = match holders(Path::new("/"), &std::path::absolute(path)?, trusted)? {
        Ok(holders) if holders.contains(&listener) => return Ok(()),
        Ok(_) => "and that user owns neither the socket nor its folder".to_owned(),
        Err(shared) => format!("and other users may create sockets in {}", shared.display()),
    };
    let why = format!(
        "a process of user {listener} listens there, {why}; run the listening process as the user \
         of this process or as root, or put the socket in a folder that only the listening user \
         may write to (as root: chown {listener} FOLDER; chmod 755 FOLDER), and let no other user \
         write to the folders above it"
    );
    Err(CallError::Untrusted(why))
}

/// Finds the users who alone control which socket `path` leads to, starting at `root`. They are the
/// initial `holders`, whom the caller trusts, and the owners of the folders on the path and of the
/// socket. If another user may have placed an entry of the path, returns the folder of that entry
/// instead.
fn holders(
    root: &Path,
    path: &Path,
    mut holders: BTreeSet<u32>,
) -> io::Result<Result<BTreeSet<u32>, PathBuf>> {
    let mut folder = root.to_owned();
    let mut left: VecDeque<OsString> = names(path).collect();
    let mut links = 0;
    // The owner of the root folder controls everything below it.
    holders.insert(folder.symlink_metadata()?.uid());
    while let Some(name) = left.pop_front() {
        if name == ".." {
            if folder != root {
                folder.pop();
            }
            continue;
        }
        let (at, within) = (folder.join(name), folder.symlink_metadata()?);
        let found = at.symlink_metadata()?;
        if !is_placed_by(&holders, &within, &found) {
            return Ok(Err(folder));
        }
        holders.insert(found.uid());
        if !found.is_symlink() {
            folder = at;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(io::Error::other(format!(
                "the path has more than {MAX_LINKS} symbolic links"
            )));
        }
        let target = at.read_link()?;
        if target.is_absolute() {
            root.clone_into(&mut folder);
        }
        names(&target).rev().for_each(|name| left.push_front(name));
    }
    Ok(Ok(holders))
}

/// Returns whether a holder of a folder must have placed the entry `found` in it.
fn is_placed_by(holders: &BTreeSet<u32>, folder: &Metadata, found: &Metadata) -> bool {
    match folder.mode() {
        mode if mode & OTHERS_WRITE == 0 => true,
        // The sticky bit stops users from replacing the entries of others. All users without an id
        // in this namespace share one id, which therefore proves nothing.
        mode if mode & STICKY != 0 => holders.contains(&found.uid()) && is_known_user(found.uid()),
        _ => false,
    }
}

/// Returns the names that a path passes through.
fn names(path: &Path) -> impl DoubleEndedIterator<Item = OsString> {
    path.components().filter_map(|component| match component {
        Component::Normal(_) | Component::ParentDir => Some(component.as_os_str().to_owned()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, create_dir, set_permissions, write};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;
    use crate::local::limits::own_user;

    /// Two users: `other` owns files and is neither root nor the caller. Root can give files to any
    /// user. Without root, `other` is the current user, and the caller is invented.
    struct Users {
        other: u32,
        caller: u32,
    }

    impl Users {
        fn new() -> Self {
            match own_user() {
                0 => Self { other: 1234, caller: 1235 },
                own => Self { other: own, caller: own + 1 },
            }
        }

        fn make_folder(&self, at: &Path, mode: u32) {
            create_dir(at).unwrap();
            set_permissions(at, Permissions::from_mode(mode)).unwrap();
            chown(at, Some(self.other), None).unwrap();
        }

        fn make_file(&self, at: &Path) {
            write(at, "").unwrap();
            chown(at, Some(self.other), None).unwrap();
        }
    }

    /// Temporary folder that root or this user owns, removed on drop.
    struct Top(PathBuf);

    impl Top {
        fn new(name: &str, mode: u32) -> Self {
            let name = format!("racksum-trust-{name}-{}", std::process::id());
            let top = std::env::temp_dir().join(name);
            create_dir(&top).unwrap();
            set_permissions(&top, Permissions::from_mode(mode)).unwrap();
            Self(top)
        }

        fn finds(&self, path: &str, holders: impl IntoIterator<Item = u32>) -> bool {
            let path = Path::new(path);
            super::holders(&self.0, path, holders.into_iter().collect()).unwrap().is_ok()
        }
    }

    impl Drop for Top {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn a_process_of_this_user_or_root_is_believed_anywhere() {
        for listener in [0, 1235] {
            check(listener, Path::new("/nowhere"), 1235).unwrap();
        }
    }

    #[test]
    fn a_user_is_believed_in_the_folder_that_root_gave_it() {
        let (top, users) = (Top::new("given", 0o755), Users::new());
        users.make_folder(&top.0.join("given"), 0o755);
        users.make_file(&top.0.join("given/socket"));
        let found = holders(&top.0, Path::new("/given/socket"), [0, users.caller].into());
        assert!(found.unwrap().unwrap().contains(&users.other));
        // The members of a group with write permission may put a socket of their own in the folder.
        users.make_folder(&top.0.join("group"), 0o775);
        users.make_file(&top.0.join("group/socket"));
        let found = holders(&top.0, Path::new("group/socket"), [0, users.caller].into());
        assert_eq!(found.unwrap(), Err(top.0.join("group")));
    }

    #[test]
    fn what_another_user_put_in_a_shared_folder_is_not_believed() {
        let (top, users) = (Top::new("shared", 0o755), Users::new());
        // This folder is like /tmp and belongs to a trusted user.
        create_dir(top.0.join("tmp")).unwrap();
        set_permissions(top.0.join("tmp"), Permissions::from_mode(0o1777)).unwrap();
        users.make_file(&top.0.join("tmp/socket"));
        users.make_folder(&top.0.join("tmp/folder"), 0o700);
        users.make_file(&top.0.join("tmp/folder/socket"));
        users.make_folder(&top.0.join("own"), 0o755);
        users.make_file(&top.0.join("own/socket"));
        symlink("../own/socket", top.0.join("tmp/link")).unwrap();
        rustix::fs::chownat(
            rustix::fs::CWD,
            top.0.join("tmp/link"),
            Some(rustix::fs::Uid::from_raw(users.other)),
            None,
            rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
        )
        .unwrap();
        // Only root can give files to two different users.
        if own_user() == 0 {
            for path in ["tmp/socket", "tmp/folder/socket", "tmp/link"] {
                assert!(!top.finds(path, [0, users.caller]), "{path}");
                assert!(top.finds(path, [0, users.other]), "{path}");
            }
        }
        assert!(top.finds("own/socket", [0, users.caller]));
        assert!(top.finds("tmp/../own/socket", [0, users.caller]));
        // Without the sticky bit, other users may replace every entry, whoever owns it.
        set_permissions(top.0.join("tmp"), Permissions::from_mode(0o777)).unwrap();
        assert!(!top.finds("tmp/socket", [0, users.other]));
    }

    #[test]
    fn links_lead_on_from_where_they_are() {
        let (top, users) = (Top::new("links", 0o755), Users::new());
        users.make_folder(&top.0.join("own"), 0o755);
        users.make_file(&top.0.join("own/socket"));
        users.make_folder(&top.0.join("all"), 0o777);
        users.make_file(&top.0.join("all/socket"));
        symlink("/own", top.0.join("absolute")).unwrap();
        symlink("../all/socket", top.0.join("own/relative")).unwrap();
        symlink("loop", top.0.join("loop")).unwrap();
        assert!(top.finds("absolute/socket", [0]));
        assert!(!top.finds("absolute/relative", [0]));
        holders(&top.0, Path::new("loop"), BTreeSet::new()).unwrap_err();
    }
}
