# Commands that a program sends to a SCSI disk itself, past the block layer. /dev/sda is the disk of scsi_debug, /dev/ram0 its copy.
. /tmp/files/lib.sh
mount -t bpf bpf /sys/fs/bpf
until [ -b /dev/sda ]; do sleep 0.2; done
cat >/tmp/command.py <<'END'
import ctypes, fcntl, os, struct, sys
# READ(10) or WRITE(10) of one sector, by struct sg_io_hdr of <scsi/sg.h>.
opcode, direction = {"read": (0x28, -3), "write": (0x2A, -2)}[sys.argv[1]]
data, sense = ctypes.create_string_buffer(os.urandom(512), 512), ctypes.create_string_buffer(32)
command = ctypes.create_string_buffer(struct.pack(">BBIBHB", opcode, 0, 4096, 0, 1, 0), 10)
address = ctypes.addressof
header = struct.pack("@iiBBHIPPPIIiPBBBBHHiII", ord("S"), direction, 10, 32, 0, 512, address(data), address(command),
                     address(sense), 10000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
header = bytearray(header)
fcntl.ioctl(os.open("/dev/sda", os.O_RDWR), 0x2285, header)
status = struct.unpack("@iiBBHIPPPIIiPBBBBHHiII", header)[13]
sys.exit(status)
END
first=11111111-1111-4111-8111-111111111111
cat /dev/sda >/dev/ram0
said() { blocks follow /dev/sda /dev/ram0 $first 2>/dev/null; }
check "added" blocks bpf /dev/sda
said >/dev/null
dd if=/dev/urandom of=/dev/sda bs=4k seek=100 count=5 oflag=direct conv=notrunc 2>/dev/null
is "ordinary writes" "$(said)" "bpf tracked $first 5"
check "a command that reads" python3 /tmp/command.py read
is "it loses nothing" "$(said)" "bpf tracked $first 0"
check "a command that writes" python3 /tmp/command.py write
case $(said) in
"bpf 1 commands that may write were sent past the block layer"*) ok "it is lost" ;;
*) not_ok "it is lost: $(said)" ;;
esac
is "the next epoch is whole" "$(said)" "bpf tracked $first 0"
check "removed" blocks unbpf /dev/sda
quiet "a SCSI disk"
done_testing
