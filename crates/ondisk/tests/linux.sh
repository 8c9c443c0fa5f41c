#!/usr/bin/env bash
# Has Linux write every kind of item. Usage: linux.sh IMAGE DIRECTORY MKFS-OPTIONS MOUNT-OPTIONS.
# Leaves copies of the image: IMAGE.logged with a log tree, IMAGE.balancing amid a balance, and
# IMAGE.end as unmounted.
set -euo pipefail
image=$1 dir=$2 mkfs=$3 options=$4

# shellcheck disable=SC2086
mkfs.btrfs --quiet $mkfs "$image"
mount -o "loop,$options" "$image" "$dir"
trap 'umount "$dir"' EXIT

btrfs quota enable "$dir"
mkdir "$dir/files" "$dir/links"
for number in $(seq 1 300); do
    head -c $((number * 37)) /dev/urandom >"$dir/files/small $number"
done
head -c 9000000 /dev/zero >"$dir/files/zeros"
head -c 9000000 /dev/urandom >"$dir/files/random"
sync -f "$dir"
for at in $(seq 5 40 2000); do
    printf x | dd of="$dir/files/random" bs=4096 seek="$at" conv=notrunc status=none
done
truncate -s 50M "$dir/files/sparse"
printf end >>"$dir/files/sparse"
fallocate -l 3M "$dir/files/prealloc"
printf begin | dd of="$dir/files/prealloc" conv=notrunc status=none
fallocate -p -o 65536 -l 65536 "$dir/files/random"
for number in $(seq 1 400); do
    ln "$dir/files/small 1" "$dir/links/$(printf '%0180d' "$number")"
done
ln -s ../files "$dir/links/symlink"
mknod "$dir/links/null" c 1 3
mknod "$dir/links/disk" b 259 1048000
mkfifo "$dir/links/fifo"
setfattr -n user.key -v value "$dir/files/zeros" 2>/dev/null || true
setfattr -n user.long -v "$(head -c 2000 /dev/zero | tr '\0' y)" "$dir/files/zeros" 2>/dev/null || true
touch -d '1901-01-01' "$dir/files/small 2"
cp --reflink=always "$dir/files/zeros" "$dir/files/clone" 2>/dev/null || true

btrfs subvolume create "$dir/sub" >/dev/null
cp -r "$dir/files" "$dir/sub/"
btrfs subvolume snapshot -r "$dir/sub" "$dir/snap 1" >/dev/null
rm -r "$dir/sub/files/small 1"*
btrfs subvolume snapshot "$dir/sub" "$dir/snap 2" >/dev/null
for number in $(seq 1 60); do
    cp --reflink=auto "$dir/sub/files/random" "$dir/snap 2/r $number"
done
btrfs subvolume snapshot "$dir/snap 2" "$dir/snap 3" >/dev/null
btrfs send -q "$dir/snap 1" 2>/dev/null | btrfs receive -q "$dir/links" 2>/dev/null || true
btrfs qgroup limit 100M "$dir/sub" 2>/dev/null || true
btrfs subvolume set-default "$(btrfs inspect-internal rootid "$dir/sub")" "$dir"
btrfs property set "$dir/files" compression zstd
sync -f "$dir"

# A log tree: synced since the last commit.
for number in $(seq 1 50); do
    printf 'logged %s' "$number" >"$dir/files/logged $number"
    mv "$dir/files/small $number" "$dir/links/moved $number"
done
dd if=/dev/urandom of="$dir/files/random" bs=4096 count=20 seek=100 conv=notrunc,fsync status=none
sync "$dir/files/logged 7" "$dir/files/zeros" "$dir/links" "$dir/files"
ln "$dir/files/logged 9" "$dir/links/logged link"
rm "$dir/files/small 77"
sync "$dir/links" "$dir/files/logged 9"
cp --sparse=always "$image" "$image.logged"

btrfs balance start --full-balance "$dir" >/dev/null &
sleep 0.2
cp --sparse=always "$image" "$image.balancing"
btrfs balance cancel "$dir" >/dev/null 2>&1 || true
wait || true
btrfs subvolume delete "$dir/snap 2" >/dev/null
btrfs filesystem sync "$dir"
rm -r "$dir/files"
sync -f "$dir"
umount "$dir"
trap - EXIT
cp --sparse=always "$image" "$image.end"
