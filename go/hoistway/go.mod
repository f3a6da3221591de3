module hoistway

go 1.19
