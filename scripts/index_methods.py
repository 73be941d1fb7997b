"""Write the index of methods, which `redgrape methods` prints without loading torch. Run it after a method changed."""

from redgrape.reading import method_index

if __name__ == "__main__":
    method_index.write()
    print(f"written: {method_index.FILE}")
